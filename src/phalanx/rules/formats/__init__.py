"""Output formats of a check report: text, JSON, SARIF, GitHub annotations, JUnit and HTML."""
