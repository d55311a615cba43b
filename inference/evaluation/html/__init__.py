"""The report as one page for a browser: tables, charts and answers token by token."""
