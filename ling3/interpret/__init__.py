"""A model looked into: traces, ablations and their table, its shape on paper."""
