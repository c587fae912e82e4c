"""When a micro step ends with an optimizer step."""

from dsjob.engine.rhythm import Rhythm


def test_the_boundary_is_counted_unless_the_program_says_it() -> None:
    rhythm = Rhythm(micro_batch=2, accumulation=2, data_size=3)
    seen = []
    for forced in (None, None, False, False, True, None, None):
        rhythm.forced = forced
        seen.append(rhythm.boundary)
        rhythm.end_micro_step(stepped=rhythm.boundary)
    assert seen == [False, True, False, False, True, False, True]
    assert rhythm.counts() == {"global_steps": 3, "global_samples": 36, "micro_steps": 7, "skipped_steps": 0}
