"""Programs that run in environments of their own and try one client each: they import nothing of ours but `report`."""
