"""Options that several commands have, and what is typed after them."""
