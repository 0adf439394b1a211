"""Training on one's own images that helps and cannot harm: candidates of rising cost, and what validation proves."""
