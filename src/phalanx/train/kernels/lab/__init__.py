"""The kernel lab: kernels listed, measured, written from a template, and judged by a guard that cheats do not pass."""
