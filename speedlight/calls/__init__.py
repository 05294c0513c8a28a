"""The public calls beside attention(), and what a repeated call need not prepare again."""
