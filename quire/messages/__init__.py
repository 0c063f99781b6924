"""Messages between caller and engine, and between the planning and the executing half."""
