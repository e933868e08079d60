"""Reads records and turns them into tables, plots and pages. Measures nothing; draws only what was recorded."""
