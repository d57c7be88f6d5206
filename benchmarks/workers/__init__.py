"""Programs that hold one model each and decode when told to, one at a time."""
