"""Errors, files, text and imports: what every room may use, and what knows none of them."""
