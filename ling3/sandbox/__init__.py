"""Running a stranger's chat template: jinja2's sandbox, with memory and time bounded."""
