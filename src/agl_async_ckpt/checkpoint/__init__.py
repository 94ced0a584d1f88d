"""One trainer's life: where it resumes, what it saves, what it keeps."""
