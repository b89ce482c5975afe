"""Live attacks on a job from outside of it."""
