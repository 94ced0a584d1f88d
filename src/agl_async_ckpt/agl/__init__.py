"""agent-lightning on VERL: one trainer's life, from where it resumes to what it saves and keeps."""
