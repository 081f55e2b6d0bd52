"""The static model: bytes per parameter by a recipe, compared with a run, and what explains the difference."""
