//! Group commit: while one batch commits, the next one gathers.
