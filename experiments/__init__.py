"""Small Ling-3s trained from scratch on tasks that tell its mechanisms apart."""
