"""How a run goes: metrics, progress, report."""
