"""Which module, object or line of the script a tensor belongs to."""
