"""Readers of other trainers' configurations, which convert them to the job schema."""
