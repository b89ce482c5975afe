"""What the script and its workers must agree on."""
