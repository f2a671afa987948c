"""From runs to an answer: tables, figures, the report in one HTML file."""
