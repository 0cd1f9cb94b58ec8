"""Small exact worlds in which every statement of theory.md can be checked."""
