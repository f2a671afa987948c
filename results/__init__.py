"""The records behind docs/results.md and docs/leaderboard.md, and what makes these pages of them."""
