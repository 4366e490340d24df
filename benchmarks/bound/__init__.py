"""How near the bound on the simulated step comes to the least simulated step."""
