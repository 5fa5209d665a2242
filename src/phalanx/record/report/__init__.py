"""Reports of a run: on a terminal, as HTML and Markdown, live, and compared with another run."""
