"""Train models on one device or many, so that an interrupted run resumes exactly; `tasks` says what is trained."""
