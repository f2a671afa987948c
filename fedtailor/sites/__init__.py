"""Real federations: a plan, sites that join by declaration, a coordinator, and the engine that carries letters."""
