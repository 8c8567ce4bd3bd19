"""The engine measured: each module is a command that writes a JSON file and a picture into `results/`."""
