"""The order of work in a pipeline: instructions, schedules, and how long they take. Needs no torch."""
