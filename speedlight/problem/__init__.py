"""What a call asks for: options and arrays become a checked `Problem`; its tiles, its work, its plan."""
