"""The ladder: one file per idea, each a composition of schedule functions, each runnable by itself."""
