"""Small Ling-3 models trained from scratch on tasks that test single mechanisms."""
