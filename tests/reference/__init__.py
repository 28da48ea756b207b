"""Plain reference implementations: no arithmetic of eco_dist is imported here."""
