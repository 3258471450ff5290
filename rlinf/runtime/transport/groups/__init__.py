"""Process groups and meshes over any hosts, each under a name of its own, awaited from asyncio."""
