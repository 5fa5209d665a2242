"""Configurations of other trainers, read into the job schema."""
