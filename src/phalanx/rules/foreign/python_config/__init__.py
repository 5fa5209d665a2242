"""Static reader of configurations that are Python programs: it evaluates their syntax tree and runs nothing."""
