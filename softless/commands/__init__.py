"""The verbs, one a file: they parse, call the library, show and write. Nothing heavy is imported before a verb runs."""
