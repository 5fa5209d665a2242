"""Fixtures of planner tests."""

from plan_jobs import make_ask, make_job

__all__ = ("make_ask", "make_job")
