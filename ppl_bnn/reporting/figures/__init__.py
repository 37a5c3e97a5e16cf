"""Pictures of reports: panels that several share, and what each draws."""
