"""The kernel lab: lists, measures and generates kernels, and judges them with a guard that cheats do not pass."""
