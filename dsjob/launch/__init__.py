"""Starts the ranks of a job, or joins the ranks that another launcher has started."""
