"""Small Ling-3s trained from scratch on tasks that test single mechanisms."""
