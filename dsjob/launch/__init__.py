"""Starting the ranks of a job, and joining those that another launcher has started."""
