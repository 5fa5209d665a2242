"""A run folder read once, as a stream, into LogFacts."""
