"""Pure functions over arrays: no modules, no weights of their own, no configuration."""
