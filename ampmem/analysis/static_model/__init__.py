"""The static model: a recipe's bytes per parameter, compared with a run, and the terms of their difference."""
