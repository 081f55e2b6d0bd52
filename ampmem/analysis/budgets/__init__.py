"""Is a run within what it may take, and has it grown since another one?"""
