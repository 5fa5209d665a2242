"""A run told to people: on a terminal, as HTML and Markdown, live, and beside another one."""
