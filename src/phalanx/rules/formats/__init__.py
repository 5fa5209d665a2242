"""A Report as text, JSON, SARIF, GitHub annotations, JUnit or HTML."""
