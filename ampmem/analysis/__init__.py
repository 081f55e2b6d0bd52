"""Pure analysis of a recording: facts and lifetimes in, categories and a summary out. Never imports torch."""
