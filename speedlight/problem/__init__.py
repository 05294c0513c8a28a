"""Options and arrays of a call, checked and joined to a `Problem`; its tiles, its work, its plan."""
