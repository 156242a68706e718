"""Reports: one run's verdicts as HTML, Markdown, JSON and JUnit."""
